"""The only modules that touch names which torch does not document."""
