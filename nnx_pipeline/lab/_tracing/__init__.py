"""How JAX traces user functions, and what their jaxprs hold."""
