"""MLflow for Surogate."""
