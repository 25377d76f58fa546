#!/usr/bin/env python3
"""As much of curl as the documentation uses, for machines that have none."""

from __future__ import annotations

import argparse
import sys
import urllib.error
import urllib.request


def main() -> int:
    """Send one request and print the reply; 22 for a status of 400 or more with `-f`, as curl does."""
    parser = argparse.ArgumentParser(prog="curl")
    parser.add_argument("url")
    parser.add_argument("-s", "--silent", action="store_true")
    parser.add_argument("-N", "--no-buffer", action="store_true")
    parser.add_argument("-f", "--fail", action="store_true")
    parser.add_argument("-i", "--include", action="store_true")
    parser.add_argument("-X", "--request", metavar="METHOD")
    parser.add_argument("-H", "--header", action="append", default=[])
    parser.add_argument("-d", "--data")
    options = parser.parse_args()
    request = urllib.request.Request(options.url, options.data and options.data.encode(), method=options.request)
    for header in options.header:
        name, _, value = header.partition(":")
        request.add_header(name, value.strip())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        reply = opener.open(request)
    except urllib.error.HTTPError as error:
        reply = error
    with reply:
        if options.include:
            print(f"HTTP/1.1 {reply.status} {reply.reason}\n{reply.headers}", flush=True)
        sys.stdout.buffer.write(reply.read())
    return 22 if options.fail and reply.status >= 400 else 0


if __name__ == "__main__":
    sys.exit(main())
