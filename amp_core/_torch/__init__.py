"""The only modules that touch names which torch does not document.

Each use belongs to a `Feature`, which says what a user loses if a torch release drops the name; everything
else then goes on. To admit a new torch release, read these modules and run the tests.
"""
