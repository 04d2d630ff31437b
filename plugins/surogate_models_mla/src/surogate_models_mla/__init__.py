"""Models with latent attention for Surogate."""
