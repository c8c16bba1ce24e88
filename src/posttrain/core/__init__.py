"""What every stage uses and what knows no stage: configuration, manifests, launching, models, statistics."""
