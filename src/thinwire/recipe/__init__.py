"""The words of a recipe: stages, the registry, presets, composing and parsing. Import from its modules."""
