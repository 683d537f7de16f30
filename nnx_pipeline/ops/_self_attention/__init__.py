"""Self-attention with its projections and rotary embedding: grouped-query, and latent."""
