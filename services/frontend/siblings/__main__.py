"""`python -m triptych_services.frontend.siblings PLACE OPTION…`: one of several, as the supervisor starts them."""

from __future__ import annotations

import json
import sys

from triptych.rpc.service_main import main
from triptych_services.frontend.siblings.app import SiblingApp
from triptych_services.frontend.siblings.link import Place

if __name__ == "__main__":
    SiblingApp.place = Place(*json.loads(sys.argv.pop(1)))
    main("frontend", __doc__, SiblingApp)
