"""The store beside its limits: memcpy, fio, an empty call. `make bench` runs it."""
