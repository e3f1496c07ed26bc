"""What several tests share: small models, the comparison, waiting, real runs, servers, faults. No test imports another test."""
