"""What training frameworks expect of a router, a file for each family of them."""
