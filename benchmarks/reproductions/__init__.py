"""What four papers claim, measured again: one module a page, and what the pages share."""
