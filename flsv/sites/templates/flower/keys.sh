#!/bin/sh
# Makes what TLS and the sites' authentication need, for a trial on one machine: sh keys.sh Boston Lyon Osaka
# Keys of a real federation: every site makes its own and sends the public half; the server's certificate comes from
# your organisation.
set -eu
umask 077
mkdir keys
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:secp384r1 -nodes -days 365 -subj /CN=localhost \
  -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -addext keyUsage=critical,digitalSignature,keyCertSign \
  -keyout keys/server.key -out keys/server.pem 2>/dev/null
cp keys/server.pem keys/ca.pem
for site; do ssh-keygen -q -t ecdsa -b 384 -N "" -C "$site" -f "keys/$site"; done
