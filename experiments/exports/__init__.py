"""Files for other projects, in their own formats."""
