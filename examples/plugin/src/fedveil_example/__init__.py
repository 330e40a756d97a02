"""One member of every kind that fedveil has a registry for; pyproject.toml names them."""
