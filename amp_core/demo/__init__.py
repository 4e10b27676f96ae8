"""The program behind ``amp demo``: train on scikit-learn's digits in float32 and in mixed precision."""
