"""Native implementations for x86-64 CPUs: C++ behind a plain C ABI, built at installation and chosen at run time."""
