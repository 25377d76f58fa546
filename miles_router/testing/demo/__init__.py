"""`python -m miles_router.testing.demo`: rollouts over two workers, start to finish."""
