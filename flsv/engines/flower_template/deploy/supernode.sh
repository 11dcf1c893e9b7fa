#!/bin/sh
# Starts a site's SuperNode, in the foreground: SITE=Boston sh deploy/supernode.sh
# It ends with an error where the SuperLink refuses it, as for a minute after a crash: whoever starts it starts it again.
set -eu
cd "$(dirname "$0")/.."
: "${SITE:?is the name of this site: of its key, and what SiteData is told}" "${SUPERLINK:=127.0.0.1:8000}" "${CA:=keys/ca.pem}"
: "${KEY:=keys/$SITE}" "${FOLDER:=$PWD/sites/$SITE}" "${POLICY:=$PWD/flsv-site.toml}" "${PORT:=9094}"
export FLWR_HOME="${FLWR_HOME:-$PWD/.flwr}" FLWR_TELEMETRY_ENABLED=0 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
exec flower-supernode --superlink "$SUPERLINK" --root-certificates "$CA" --port "$PORT" \
  --auth-supernode-private-key "$KEY" ${HEALTH:+--health-server-address "$HEALTH"} ${TRUSTED:+--trusted-entities "$TRUSTED"} \
  --node-config "site=\"$SITE\" folder=\"$FOLDER\" policy=\"$POLICY\""
