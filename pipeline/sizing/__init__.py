"""How much memory the roles of a job need of a GPU. Pure."""
