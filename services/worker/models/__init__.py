"""The model families, one file each, behind one constructor and a registry."""
