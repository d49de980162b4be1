"""The logger of cuflash: `CUFLASH_LOG=1` prints every new plan and every compile to stderr."""

import logging
import os

logger = logging.getLogger("cuflash")
if os.environ.get("CUFLASH_LOG", "") not in ("", "0"):
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("cuflash: %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.DEBUG)
