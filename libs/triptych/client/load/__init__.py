"""Load on a server, measured from the outside: datasets, arrivals, backends, figures."""
