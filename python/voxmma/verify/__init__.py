"""fp64 references, error metrics and bounds, audits, guards, shadow verification, calibrated plans."""
