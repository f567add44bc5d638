"""How pictures look and are saved."""
