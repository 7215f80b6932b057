"""Virtual machines with systemd, cgroup v2 and several NUMA nodes, for tests and by hand."""
