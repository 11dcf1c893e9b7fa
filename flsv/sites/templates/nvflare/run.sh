#!/bin/sh
# Submits the job and waits for its end: STATUS=.../server/runs/status.json sh run.sh Boston Lyon Osaka
# It waits two minutes for the named sites, since a job goes only to those that are there.
# NVFlare ends a job if a site's process for it dies. Then the job is submitted again, and the run continues.
# Exit status: 0 after the run has finished, else 1: it has failed (status.json gives the reason), or was aborted.
set -eu
cd "$(dirname "$0")"
: "${STATUS:?is the file status.json in the run's folder at the server}"

are_there() {
  sites=$(timeout 60 nvflare system status 2>/dev/null) || return 1
  for site; do echo "$sites" | grep -q "^$site " || return 1; done
}

for attempt in 1 2 3 4 5 6 7 8 9 10; do
  for look in $(seq 24); do are_there "$@" && break; sleep 5; done
  job=$(timeout 120 nvflare job submit -j job | sed -n 's/^job_id: //p')
  # Each line goes on to this script's error output, which tee would open anew: it would empty a log file.
  end=$(nvflare job monitor "$job" 2>&1 | while IFS= read -r line; do
    printf '%s\n' "$line" >&2
    printf '%s\n' "$line"
  done | grep -o 'FINISHED:[A-Z_]*' | tail -1)
  [ -f "$STATUS" ] && cat "$STATUS" && echo
  case $end in
    FINISHED:COMPLETED) exit 0 ;;
    FINISHED:ABORTED) exit 1 ;;
  esac
  grep -qs '"status": "failed"' "$STATUS" && exit 1
  sleep 10
done
exit 1
