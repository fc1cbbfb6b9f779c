#!/bin/sh
# Start MLflow's server, always with basic authentication. All secrets come from the environment:
# MLFLOW_BACKEND_STORE_URI, MLFLOW_ARTIFACTS_DESTINATION, MLFLOW_FLASK_SERVER_SECRET_KEY, and the first user's
# MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. It listens on MLFLOW_HOST, by default loopback.
set -eu
for name in MLFLOW_BACKEND_STORE_URI MLFLOW_ARTIFACTS_DESTINATION MLFLOW_FLASK_SERVER_SECRET_KEY \
    MLFLOW_TRACKING_USERNAME MLFLOW_TRACKING_PASSWORD; do
    eval "[ -n \"\${$name:-}\" ]" || { echo "mlflow.sh: $name is not set" >&2; exit 2; }
done
ini() { # escape a value for Python's parser of INI files, which interprets %
    printf '%s' "$1" | sed 's/%/%%/g'
}
umask 077
MLFLOW_AUTH_CONFIG_PATH=$(mktemp)
MLFLOW_AUTH_ADMIN_PASSWORD=$MLFLOW_TRACKING_PASSWORD
export MLFLOW_AUTH_CONFIG_PATH MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false
cat >"$MLFLOW_AUTH_CONFIG_PATH" <<END
[mlflow]
default_permission = MANAGE
database_uri = $(ini "$MLFLOW_BACKEND_STORE_URI")
admin_username = $(ini "$MLFLOW_TRACKING_USERNAME")
# Checking a password takes half a second of processor time, on purpose; these cache the result.
auth_cache_max_size = 1000
auth_cache_ttl_seconds = 60
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
END
exec mlflow server --app-name basic-auth --host "${MLFLOW_HOST:-127.0.0.1}" --port "${MLFLOW_PORT:-5000}" --workers 2 \
    --allowed-hosts "${MLFLOW_ALLOWED_HOSTS:-localhost:*,127.0.0.1:*}"
