"""Tasks, one file each: losses and scores. `trainkit.config.schema.TABLES` maps words of recipes to their classes."""
