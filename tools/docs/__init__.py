"""Documentation: checks of its pages, tables made from the code, and the site."""
