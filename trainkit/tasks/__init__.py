"""What is learned: one file a task. `trainkit.recipe.TABLES` maps the words of recipes to the classes here."""
