"""How the suite is run: which tests, and what it says meanwhile. pytest loads these modules as plugins."""
