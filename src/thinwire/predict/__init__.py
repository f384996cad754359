"""What a step will take: networks, processors, models and recipes as data. Import from its modules."""
