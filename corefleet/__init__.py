"""corefleet: AI-agent workloads on thousands of bare-metal CPU servers."""
