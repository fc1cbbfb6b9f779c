#!/bin/sh
# Start the server in its image, with the compile cache of the build.
#
# The cache has a folder for each version of jaxlib and kind of processor, so another kind of processor does not use it.
set -eu
cp -R compiled/. .gradtrail/xla
exec gradtrail serve --host 0.0.0.0 "$@"
