"""What four papers claim, measured again: one package per page, and what the pages share."""
