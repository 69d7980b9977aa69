// Generate streams one answer from a Triptych server: generate ADDRESS "prompt" [TEMPERATURE]
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	triptychv1 "triptych.dev/api/triptych/v1"
)

const deadline = 2 * time.Minute

func generate(ctx context.Context, address, prompt string, temperature float32) error {
	connection, err := grpc.DialContext(ctx, address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()

	text := &triptychv1.ContentPart{Part: &triptychv1.ContentPart_Text{Text: prompt}}
	message := &triptychv1.ChatMessage{Role: "user", Parts: []*triptychv1.ContentPart{text}}
	chat := &triptychv1.Chat{Messages: []*triptychv1.ChatMessage{message}}
	// Cancelling the context aborts the request in the server.
	stream, err := triptychv1.NewGenerationServiceClient(connection).StreamGenerate(ctx, &triptychv1.StreamGenerateRequest{
		Generation: &triptychv1.Generation{
			Prompt:   &triptychv1.Generation_Chat{Chat: chat},
			Sampling: &triptychv1.SamplingParams{Temperature: &temperature},
		},
	})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		// Events of other kinds are ignored: later versions add some.
		switch event := response.Event.(type) {
		case *triptychv1.StreamGenerateResponse_Output:
			fmt.Print(event.Output.Text)
		case *triptychv1.StreamGenerateResponse_Finished:
			usage := event.Finished.Usage
			fmt.Printf("\nusage: %d prompt tokens (%d cached), %d output tokens\n",
				usage.NumPromptTokens, usage.NumCachedTokens, usage.NumOutputTokens)
		}
	}
}

// describe tells the status, the machine-readable reason, and each field that is wrong.
func describe(err error) {
	found := status.Convert(err)
	fmt.Fprintf(os.Stderr, "%s: %s\n", found.Code(), found.Message())
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Fprintf(os.Stderr, "  reason: %s (%s)\n", detail.Reason, detail.Domain)
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				fmt.Fprintf(os.Stderr, "  %s: %s\n", violation.Field, violation.Description)
			}
		}
	}
}

func main() {
	temperature := 0.0
	var err error
	if len(os.Args) == 4 {
		temperature, err = strconv.ParseFloat(os.Args[3], 32)
	}
	if len(os.Args) < 3 || len(os.Args) > 4 || err != nil {
		fmt.Fprintln(os.Stderr, `usage: generate ADDRESS "prompt" [TEMPERATURE]`)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, deadline)
	defer cancel()
	if err := generate(ctx, os.Args[1], os.Args[2], float32(temperature)); err != nil {
		describe(err)
		os.Exit(1)
	}
}
