"""One worker of several processes: its ranks meet, are fed the same steps by their leader, and live and end as one."""
