"""An example of a package that extends Triptych by entry points."""
