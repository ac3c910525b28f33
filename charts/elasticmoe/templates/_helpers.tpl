{{- define "elasticmoe.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "elasticmoe.serviceAccount" -}}
{{- default (printf "%s-operator" (include "elasticmoe.fullname" .)) .Values.serviceAccount.name }}
{{- end }}

{{- define "elasticmoe.selector" -}}
app.kubernetes.io/name: elasticmoe-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "elasticmoe.labels" -}}
{{ include "elasticmoe.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- /* An image's reference: takes a list of the image and the root. */ -}}
{{- define "elasticmoe.image" -}}
{{- $image := index . 0 -}}{{- $root := index . 1 -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ default $root.Chart.AppVersion $image.tag }}{{ end }}
{{- end }}

{{- /* What the operator may do to namespaced objects. No rule names Secrets: pods get theirs from the kubelet. */ -}}
{{- define "elasticmoe.rules" -}}
- apiGroups: [elasticmoe.io]
  resources: [elasticmoedeployments]
  verbs: [get, list, watch, patch]
- apiGroups: [elasticmoe.io]
  resources: [elasticmoedeployments/status]
  verbs: [get, patch]
- apiGroups: [apps]
  resources: [deployments, daemonsets]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end }}
