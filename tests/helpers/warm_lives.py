"""Importing this module makes lives begin at once: see `lives`."""

import lives

lives.warm()
