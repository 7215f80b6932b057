"""Tests in a virtual machine with systemd, cgroup v2 and several NUMA nodes."""
