#!/bin/sh
# Starts the SuperLink, in the foreground: sh deploy/superlink.sh
# What it knows (the sites' keys, runs, messages on their way) is in $STATE: started again, it goes on with that.
# Whoever reaches its port can start apps and register keys: let sites reach it through deploy/nginx.conf only.
set -eu
cd "$(dirname "$0")/.."
: "${HOST:=127.0.0.1}" "${SUPERLINK:=127.0.0.1:8000}" "${KEYS:=keys}" "${STATE:=state}"
export FLWR_HOME="${FLWR_HOME:-$PWD/.flwr}" FLWR_TELEMETRY_ENABLED=0
mkdir -p "$STATE"
exec flower-superlink --host "$HOST" --port "${SUPERLINK##*:}" --database "$STATE/superlink.db" \
  --ssl-ca-certfile "$KEYS/ca.pem" --ssl-certfile "$KEYS/server.pem" --ssl-keyfile "$KEYS/server.key" \
  --enable-supernode-auth --disable-runtime-dependency-installation
