"""What clients speak to: gRPC, admission, health and telemetry of a replica. Without torch."""
