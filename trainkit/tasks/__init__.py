"""Tasks, one file each: losses and metrics. `trainkit.config.schema.TABLES` maps task names of recipes to classes."""
