#!/bin/sh
# Starts a site's SuperNode, in the foreground: SITE=Boston sh deploy/supernode.sh
# It ends with Exit Code: 305 where the SuperLink refuses it: its key (keys/$SITE.pub) is not registered at the server, or,
# for a minute after a crash, it is thought to be there still. Whoever starts it starts it again.
set -eu
cd "$(dirname "$0")/.."
: "${SITE:?is the name of this site: of its key, and what SiteData is told}" "${SUPERLINK:=127.0.0.1:8000}" "${CA:=keys/ca.pem}"
: "${KEY:=keys/$SITE}" "${FOLDER:=$PWD/sites/$SITE}" "${POLICY:=$PWD/flsv-site.toml}" "${PORT:=9094}"
[ -f "$KEY" ] || { echo "there is no key $KEY: SITE=$SITE must name a site that has one" >&2; exit 1; }
export FLWR_HOME="${FLWR_HOME:-$PWD/.flwr}" FLWR_TELEMETRY_ENABLED=0 FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.1
exec flower-supernode --superlink "$SUPERLINK" --root-certificates "$CA" --port "$PORT" \
  --auth-supernode-private-key "$KEY" ${HEALTH:+--health-server-address "$HEALTH"} ${TRUSTED:+--trusted-entities "$TRUSTED"} \
  --node-config "site=\"$SITE\" folder=\"$FOLDER\" policy=\"$POLICY\""
