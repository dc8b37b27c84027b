"""Drawing: one style (`style`), paper beside measured (`overlay`, `roofline`), files on disk (`draw`)."""

import os

os.environ["MPLBACKEND"] = "agg"  # files, and no windows; of an unknown one of the user's matplotlib cannot be imported
