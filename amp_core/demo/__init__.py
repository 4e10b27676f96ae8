"""What ``amp demo`` runs: the digits that scikit-learn ships, trained in float32 and in mixed precision."""
