"""Generated from proto/corefleet/v1 by `make proto`; do not edit."""
