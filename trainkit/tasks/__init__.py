"""What is learned: one file a task. `trainkit.config.schema.TABLES` maps the words of recipes to the classes here."""
