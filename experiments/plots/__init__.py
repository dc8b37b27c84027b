"""Drawing: one style (`style`), paper beside measured (`overlay`, `roofline`), files on disk (`draw`)."""
