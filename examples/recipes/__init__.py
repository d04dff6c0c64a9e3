"""Known results that can be repeated: each folder has a recipe.toml, and a job file unless it names one beside."""
