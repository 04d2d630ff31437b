"""OLMo models for Surogate."""
