// go run modelfile.go JOBS.json: prints the texts that templates of Ollama make of conversations.
//
// Ollama executes them with Go's text/template. `.Messages` are all messages, `.System` the text of those of the system.
package main

import (
	"encoding/json"
	"os"
	"strings"
	"text/template"
)

type message struct{ Role, Content string }

type job struct {
	Template string
	Messages []message
}

func render(j job) string {
	var system []string
	for _, m := range j.Messages {
		if m.Role == "system" {
			system = append(system, m.Content)
		}
	}
	parsed, err := template.New("").Option("missingkey=zero").Parse(j.Template)
	if err != nil {
		return "error: " + err.Error()
	}
	var text strings.Builder
	values := map[string]any{"Messages": j.Messages, "System": strings.Join(system, "\n\n")}
	if err := parsed.Execute(&text, values); err != nil {
		return "error: " + err.Error()
	}
	return text.String()
}

func main() {
	content, err := os.ReadFile(os.Args[1])
	if err != nil {
		panic(err)
	}
	var jobs []job
	if err := json.Unmarshal(content, &jobs); err != nil {
		panic(err)
	}
	texts := make([]string, len(jobs))
	for i, j := range jobs {
		texts[i] = render(j)
	}
	if err := json.NewEncoder(os.Stdout).Encode(texts); err != nil {
		panic(err)
	}
}
