"""`python -m trainer.report RUN [RUN...] [out=FILE]`: runs as one page, RUN/report.html unless `out` says otherwise.

A run that is still going is shown as far as it has come. Exit status: 0 written, 2 a folder that holds no run, or a
page that cannot be written.
"""

import sys
from collections.abc import Sequence

from trainer.config import ConfigError
from trainer.report.page import write_report

USAGE = "python -m trainer.report RUN [RUN...] [out=FILE]"


def main(arguments: Sequence[str]) -> int:
    outs = [argument.removeprefix("out=") for argument in arguments if argument.startswith("out=")]
    paths = [argument for argument in arguments if not argument.startswith("out=")]
    if not paths or len(outs) > 1 or "" in (*paths, *outs) or any(path.startswith("-") for path in paths):
        print(f"usage: {USAGE}", file=sys.stderr)
        return 2
    try:
        print(write_report(paths, outs[0] if outs else None))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
